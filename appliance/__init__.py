"""Tandem: one large Mixture-of-Experts model on a pair of cards."""
