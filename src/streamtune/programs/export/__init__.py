"""Write a trained model the way every other tool reads it: adapters merged, checked against the model as it trained."""
