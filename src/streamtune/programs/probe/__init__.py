"""Find the longest sequence that trains, by whole training steps in processes of their own."""
