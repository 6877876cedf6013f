"""Speed of the machine right now: a shared one changes by a third from one minute to the next."""

import json
import os
import subprocess
import sys
from pathlib import Path


class Calibration:
    """Script that measures read bandwidth of two threads (GB/s) and AMX peak (TFLOP/s), in 3 seconds.

    It appends a JSON record to the file that CALIB_OUT names. Where it does not run (no C compiler, no AVX-512), that
    is said once, and there are no such figures; nor without a script.
    """

    def __init__(self, script: Path | None, folder: Path) -> None:
        self._script = script
        self._records = folder / "calibration.json"
        self._runs_here = script is not None

    def measure(self, label: str) -> dict[str, float | str] | None:
        """Return what was measured, and when."""
        if not self._runs_here:
            return None
        command = [sys.executable, str(self._script), label]
        environment = os.environ | {"CALIB_OUT": str(self._records)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            self._runs_here = False
            print(f"no calibration: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}", flush=True)
            return None
        return json.loads(self._records.read_text(encoding="utf-8"))[-1]  # type: ignore[no-any-return]
