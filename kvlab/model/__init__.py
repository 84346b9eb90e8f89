"""A Llama-type decoder whose attention is a Variant and whose cache is a KVCache: its config, weights and tokenizer."""
