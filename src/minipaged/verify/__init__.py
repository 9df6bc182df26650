"""`minipaged verify`: is what this engine computes what Hugging Face computes, layer by layer and token by token?

oracle.py        Hugging Face's intermediates and greedy tokens (the only file that imports transformers)
observe.py       back ends that look at every call of a forward pass
layers.py        each operation of each layer against the oracle, through a shuffled pool full of NaN
decode.py        greedy decoding through the real engine, teacher-forced
determinism.py   the same requests computed in other ways: are the logits the same bits?
judge.py         error figures, tolerances, verdicts
report.py, html.py   for people
run.py           `verify_model`: all of it
"""
