"""Search, then compile or run a short list of finalists, and keep the best."""
