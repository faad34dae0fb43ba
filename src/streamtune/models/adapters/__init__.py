"""Add adapters to a model, set their first values, save and load them. ``base/adapters.py`` lists the kinds."""
