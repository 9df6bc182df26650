"""A process that is interrupted all the time while it generates; prints what went wrong as JSON.

    python sigint_child.py FOLDER COUNT

Every second SIGINT comes soon after the one before, so that it takes effect in the middle of a step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace

from minipaged import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5, 6], [9, 8, 7], [1, 2, 3, 4, 5, 9], [4, 4]]
PARAMS = [GREEDY, replace(GREEDY, n=2, temperature=1.0, seed=5, presence_penalty=0.5), GREEDY, replace(GREEDY, n=3)]


def generate(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def stream(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS[1], PARAMS[1]):
        pass


def main() -> None:
    folder, count = sys.argv[1], int(sys.argv[2])
    llm = LLM(folder, num_blocks=12, block_size=4, max_model_len=32, max_num_batched_tokens=16)
    manager, engine = llm.engine.block_manager, llm.engine
    began = time.perf_counter()
    expected = generate(llm)
    duration = time.perf_counter() - began
    interrupts, repairs = 0, 0
    reset = manager.reset

    def counted() -> None:
        nonlocal repairs
        repairs += 1
        reset()

    manager.reset = counted  # type: ignore[method-assign]
    wrong: list[str] = []
    armed = over = False  # plain names: an interrupt inside `threading.Event` can leave its lock taken

    def press() -> None:
        rng = random.Random(1)
        while not over:
            time.sleep(0.0005)
            if armed:
                time.sleep(rng.random() ** 2 * duration)
                os.kill(os.getpid(), signal.SIGINT)
                if rng.random() < 0.5:
                    time.sleep(rng.random() * 0.002)
                    os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    rounds = 0
    while interrupts < count:
        rounds += 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            armed = True
            while True:
                stream(llm) if rounds % 3 == 0 else generate(llm)
        except KeyboardInterrupt:
            interrupts += 1
        while True:
            try:
                armed = False
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                break
            except KeyboardInterrupt:
                interrupts += 1
        if rounds % 8 == 0:
            if generate(llm) != expected:
                wrong.append(f"round {rounds}: tokens")
            stats = engine.stats()
            if engine.has_unfinished() or stats.blocks_in_use or stats.running or stats.waiting:
                wrong.append(f"round {rounds}: {stats}, {list(engine._live)}")
            if not manager.invariants_ok() or llm._news or engine.runner.input_batch.tables._row_of:  # type: ignore[attr-defined]
                wrong.append(f"round {rounds}: left behind")
    over = True
    presser.join()
    print(json.dumps({"interrupts": interrupts, "repairs": repairs, "rounds": rounds, "wrong": wrong[:10]}))


if __name__ == "__main__":
    main()
