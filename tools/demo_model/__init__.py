"""The parts of ``tools/train_demo_model.py``: text, network, folder."""
