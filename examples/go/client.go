// A client of kvledger with generated code: prints the answer as it comes, and what it cost.
//
// See README.md in this folder for how it is built.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	kvledger "kvledger/v1"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: client SERVER PROMPT")
		os.Exit(2)
	}
	if err := generate(os.Args[1], os.Args[2]); err != nil {
		// google.rpc details, such as the field that is wrong, are in status.Convert(err).Details().
		fmt.Fprintf(os.Stderr, "%s: %s\n", status.Code(err), status.Convert(err).Message())
		os.Exit(1)
	}
}

func generate(server, prompt string) error {
	// unix:/path works as well. For TLS: grpc.WithTransportCredentials(credentials.NewTLS(config)).
	connection, err := grpc.Dial(server, grpc.WithInsecure(),
		// The server lets clients ask every 10 s whether it is there.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 10 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true,
		}))
	if err != nil {
		return err
	}
	defer connection.Close()
	// A deadline is part of every call: what nobody waits for any more is not computed.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	maxTokens := uint32(32)
	stream, err := kvledger.NewGenerationServiceClient(connection).Generate(ctx, &kvledger.GenerateRequest{
		Prompt: &kvledger.GenerateRequest_Chat{Chat: &kvledger.ChatPrompt{
			Messages: []*kvledger.ChatMessage{{Role: kvledger.Role_ROLE_USER, Content: prompt}},
		}},
		Stop: &kvledger.StopOptions{MaxTokens: &maxTokens},
	})
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		switch event := response.Event.(type) {
		case *kvledger.GenerateResponse_Delta:
			fmt.Print(event.Delta.Text)
		case *kvledger.GenerateResponse_Finished:
			usage := event.Finished.Usage
			fmt.Printf("\n[%d + %d tokens]\n", usage.PromptTokens, usage.CompletionTokens)
		}
	}
}
