// A client that knows kvledger only by its protoset: no generated code.
//
//   npm install
//   node client.js kvledger.protoset 127.0.0.1:50051 "What is the capital of France?"
//
// The protoset is in the Python package (kvledger/v1/kvledger.protoset), or made from proto/ with
// `protoc --include_imports --descriptor_set_out`.
"use strict";

const fs = require("fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

function main(protoset, server, prompt) {
  const definition = loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(protoset), {
    keepCase: true,
    enums: String,
    longs: String, // block-seconds do not fit into a number
    oneofs: true,
  });
  const { kvledger } = grpc.loadPackageDefinition(definition);
  // For TLS: grpc.credentials.createSsl(ca, key, cert).
  const client = new kvledger.v1.GenerationService(server, grpc.credentials.createInsecure());
  const request = {
    chat: { messages: [{ role: "ROLE_USER", content: prompt }] },
    stop: { max_tokens: 32 },
  };
  // A deadline is part of every call: what nobody waits for any more is not computed.
  const call = client.Generate(request, { deadline: Date.now() + 120_000 });
  call.on("data", (response) => {
    if (response.event === "delta") {
      process.stdout.write(response.delta.text);
    } else if (response.event === "finished") {
      const { prompt_tokens, completion_tokens } = response.finished.usage;
      console.log(`\n[${prompt_tokens} + ${completion_tokens} tokens]`);
    }
  });
  call.on("error", (error) => {
    console.error(`${grpc.status[error.code]}: ${error.details}`);
    process.exitCode = 1;
  });
  call.on("status", () => client.close());
}

if (process.argv.length !== 5) {
  console.error("usage: client.js PROTOSET SERVER PROMPT");
  process.exit(2);
}
main(...process.argv.slice(2));
