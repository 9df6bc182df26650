"""A conversation with a model on the command line.

session.py    turns, the prompt made of them, one answer at a time; knows nothing of a terminal
commands.py   /help, /system, /stats, ...
editor.py     where lines come from: a line editor, or a pipe
screen.py     where text goes to: styles on a terminal, none into a pipe
loop.py       a line in, an answer or a command's reply out; what Ctrl-C does
"""
