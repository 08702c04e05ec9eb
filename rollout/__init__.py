"""Long-lived vLLM servers, environments, tools, and the clients of retrievers and rewards."""
