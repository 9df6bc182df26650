"""The parts of tools/draw_figure.py: what is drawn (scene), the words, and the canvas."""
