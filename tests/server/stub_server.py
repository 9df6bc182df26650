"""A server process over the scripted runner, for tests that send signals: `stub_server.py FOLDER STEP_SECONDS TIMEOUT`.

Prints its port, and at a clean end how many blocks are still in use; the runner writes for ever.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from server_rig import ScriptedRunner

from minipaged.engine.config import EngineConfig
from minipaged.engine.engine import Engine
from minipaged.kv import KVBlockManager
from minipaged.llm.async_llm import AsyncLLM
from minipaged.server import ServerSettings, create_app
from minipaged.server.lifecycle import listen, run
from minipaged.text.tokenizer import Tokenizer

if __name__ == "__main__":
    runner = ScriptedRunner()
    seconds = float(sys.argv[2])
    runner.gate.wait = lambda timeout: time.sleep(seconds) or True  # type: ignore[method-assign]
    engine = Engine(
        runner,
        KVBlockManager(4096, 4),
        EngineConfig(vocab_size=320, max_num_batched_tokens=16),
        tokenizer=Tokenizer(sys.argv[1]),
    )
    app = create_app(AsyncLLM.from_engine(engine), ServerSettings(shutdown_timeout=float(sys.argv[3])))
    sock = listen("127.0.0.1", 0)
    print(sock.getsockname()[1], flush=True)
    run(app, sock)
    print(f"ended with {engine.stats().blocks_in_use} blocks in use", flush=True)
