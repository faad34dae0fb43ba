"""Keys of a recipe, a file a topic: their texts, and what they combine with."""
