"""Text around the engine: tokenizer, chat template, thoughts, token ids back to text, strings that end it. No torch."""
