"""The worker's side of an update, from the RPC into the model: the only part that imports vLLM."""
