"""Programs around training: each measures, shows or writes a model. Nothing that trains imports one of them."""
