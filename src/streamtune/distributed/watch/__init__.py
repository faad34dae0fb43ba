"""Watch the ranks while they train, and name the one that is at fault."""
