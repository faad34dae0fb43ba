"""Export a trained model in Hugging Face format: merge its adapters, and compare the result with the trained model."""
