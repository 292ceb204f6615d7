"""The gRPC services: validate, translate, admit, stream. No proto message travels below here."""
