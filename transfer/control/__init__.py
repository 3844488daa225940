"""The control channel between a decode engine and the prefill engines that it pulls from: server and client."""
