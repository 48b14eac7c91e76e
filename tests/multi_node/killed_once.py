"""Runs train.py. Rank 3 of the first attempt kills itself at the first checkpoint."""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path


def _kill_when_there_is(checkpoint: Path) -> None:
    while not checkpoint.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


script, *arguments = sys.argv[1:]
checkpoint = next(word.partition("=")[2] for word in arguments if word.startswith("--checkpoint="))
if os.environ["RANK"] == "3" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    threading.Thread(target=_kill_when_there_is, args=[Path(checkpoint)], daemon=True).start()
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
