"""Add adapters to a model, set their initial values, save and load them. ``base/adapters.py`` lists the kinds."""
