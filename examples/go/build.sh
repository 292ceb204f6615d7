#!/bin/sh
# Generates code from the contract and builds the client, with what Debian has and no network:
#
#   build.sh PROTO_FOLDER OUT_FOLDER      makes OUT_FOLDER/client
set -eu
proto=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$2/src/client"
out=$(cd "$2" && pwd)
# The contract says nothing of Go packages: they are named here.
packages=Mkvledger/v1/generation.proto=kvledger/v1,Mkvledger/v1/models.proto=kvledger/v1
protoc -I "$proto" --go_out="$out/src" --go_opt="$packages" \
  --go-grpc_out="$out/src" --go-grpc_opt="$packages" \
  "$proto/kvledger/v1/generation.proto" "$proto/kvledger/v1/models.proto"
cp "$here/client.go" "$out/src/client/"
# Debian's Go packages lie in a GOPATH; with modules, leave these two out and run `go mod init` first.
GO111MODULE=off GOPATH="$out:/usr/share/gocode" GOCACHE="$out/cache" \
  go build -o "$out/client" client
