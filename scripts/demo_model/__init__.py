"""How the demo model is made: corpus, tokenizer, training, export and model card. `scripts/train_demo_model.py` drives it."""
