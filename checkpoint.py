"""Checkpoints, written whole or not at all, and the run folder that they lie in.

checkpoint-K/ is a Hugging Face model folder of weights version K (for transformers or `vllm serve`), and
    learner.safetensors    float32 master weights and Adam's states, flat
    versions.safetensors   older versions that the lag, or an evaluation still waiting, will ask for
    manifest.json          whose it is, its step, the evaluations still waiting; size and sha256 of every file
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil

FORMAT = 1  # of all of the above
# settings that a resumed run may change: with aligned kernels no update depends on them
FREE = {"steps", "rollout_timeout", "max_bad_steps", "engines", "tensor_parallel", "learners", "ray_address", "max_restarts"}


def identity(settings: dict, model: pathlib.Path) -> dict:
    """What a checkpoint and the run that goes on from it must have in common."""
    fixed = {k: v for k, v in settings.items() if k not in FREE | {"out", "resume"}}
    return {"format": FORMAT, "model": _sha256((model / "config.json").read_text()), "settings": fixed}


def save(folder: pathlib.Path, step: int, learner, store, tokenizer, whose: dict, waiting: dict) -> pathlib.Path:
    """Write checkpoint-`step` under another name, sync it, rename it; then remove all but the newest --keep. whose: of
    `identity`; waiting: version -> weights of evaluations still to run. Raises OSError if it cannot be written."""
    from safetensors.torch import save_file

    final, scratch = folder / f"checkpoint-{step}", folder / f".checkpoint-{step}"
    needed = {v: store.get(v) for v in store.versions() if v >= step - whose["settings"]["lag"]} | waiting
    try:
        for half_written in folder.glob(".checkpoint-*"):
            shutil.rmtree(half_written)
        learner.model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        index = scratch / "model.safetensors.index.json"
        if not index.exists():  # of several files there is one; without it vLLM takes every *.safetensors for the model's
            index.write_text(json.dumps({"weight_map": dict.fromkeys(learner.model.state_dict(), "model.safetensors")}))
        save_file(learner.state(), scratch / "learner.safetensors")
        save_file({f"{v}/{name}": w for v in needed if v < step for name, w in needed[v].items()}, scratch / "versions.safetensors")
        files = {str(p.relative_to(scratch)): _digest(p) for p in sorted(scratch.rglob("*")) if p.is_file()}
        manifest = whose | {"step": step, "waiting": sorted(waiting), "files": files}
        write_whole(scratch / "manifest.json", json.dumps(manifest | {"seal": _sha256(manifest)}, indent=1))
        scratch.rename(final)
        _sync(folder)
    except Exception as error:  # the libraries in Rust have their own for a full disk
        shutil.rmtree(scratch, ignore_errors=True)
        raise OSError(f"{final} could not be written: {error}") from error
    keep = whose["settings"]["keep"]
    for old in checkpoints(folder)[:-keep] if keep else []:
        shutil.rmtree(old)
    return final


def load(checkpoint: pathlib.Path, learner, store) -> None:
    """Restore the learner and publish the older versions."""
    from safetensors.torch import load_file

    from rollout import Weights

    learner.load_state(load_file(checkpoint / "learner.safetensors"))
    older = load_file(checkpoint / "versions.safetensors", device=str(learner.device))
    for version in {key.partition("/")[0] for key in older}:
        store.publish(int(version), Weights({k.partition("/")[2]: w for k, w in older.items() if k.startswith(f"{version}/")}))


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Those that have their final name, oldest first."""
    numbered = [p for p in folder.glob("checkpoint-*") if p.name.partition("-")[2].isdigit()]
    return sorted(numbered, key=lambda p: int(p.name.partition("-")[2]))


def newest(folder: pathlib.Path, whose: dict) -> tuple[pathlib.Path, dict, dict]:
    """The newest whole checkpoint, its manifest, and of those newer that are not whole the paths, with a line on each. Raises
    ValueError if there is none, or if it is of another format, model or settings than `whose`."""
    passed_over = {}
    for path in reversed(checkpoints(folder)):
        try:
            manifest = dict(json.loads((path / "manifest.json").read_text()))
            if manifest.pop("seal") != _sha256(manifest):
                raise ValueError("manifest.json is not what was written")
            for name, digest in manifest["files"].items() if manifest["format"] == FORMAT else ():
                if _digest(path / name) != digest:
                    raise ValueError(f"{name} is not what was written")
        except (OSError, ValueError, KeyError, TypeError) as error:
            passed_over[path] = f"{path} is not whole and was passed over: {error}"
            continue
        others = [key for key in ("format", "model") if manifest.get(key) != whose[key]] or [
            "--" + key.replace("_", "-") for key, value in whose["settings"].items() if manifest["settings"].get(key) != value]  # fmt: skip
        if others:
            raise ValueError(f"{path.name} is of another {others[0]} than this run's")
        return path, manifest, passed_over
    raise ValueError("; ".join(["no checkpoint there: start again in another folder, with --save-every to have one sooner", *passed_over.values()]))


def read_rows(path: pathlib.Path) -> list[dict]:
    """Of a JSON-lines file; a last line that was cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def write_whole(path: pathlib.Path, text: str) -> None:
    """Whenever the process or the machine dies, the old file is there or the new one, whole."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(text)
    _sync(scratch)
    scratch.replace(path)
    _sync(path.parent)


def _sync(path: pathlib.Path) -> None:
    fd = os.open(path, os.O_RDONLY)  # of a folder: its entries
    os.fsync(fd)
    os.close(fd)


def _digest(path: pathlib.Path) -> list:
    """[bytes, sha256] of a file, which is on the disk from now on."""
    _sync(path)
    with open(path, "rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _sha256(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
