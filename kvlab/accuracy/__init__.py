"""What a KV cache costs in quality: scoring of real text, recall trained from scratch, and the statistics of both."""
