"""Runs Python that a model wrote: bubblewrap's namespaces, a seccomp filter and resource limits. Linux only.

The program sees Python's standard library, numpy and sympy, all read-only, and a /tmp of its own. It is one process with one
thread, so the limit on its address space is the limit on its memory. It has no network, no /proc, and nothing of ours.
Hash seed, addresses and random seeds are the same in every call, so one program gives one output, unless it asks for the time.
"""

import math
import os
import pathlib
import platform
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time

MAX_OUTPUT = 1 << 20  # bytes; a program that writes more is stopped
SHOWN_OUTPUT = 8192  # bytes; the middle of longer output is left out
TMP_BYTES = 64 << 20  # of the program's /tmp, and of any one file
PACKAGES = ("numpy", "numpy.libs", "sympy", "mpmath")  # what the program can import besides the standard library
ENV = dict(PATH="/usr/bin", HOME="/tmp", LANG="C.UTF-8", PYTHONPATH="/packages", PYTHONHASHSEED="0", PYTHONDONTWRITEBYTECODE="1",
           OPENBLAS_NUM_THREADS="1")  # fmt: skip

# System calls that fail with EPERM, by their numbers on x86-64 and aarch64.
DENIED = dict(
    # more processes or threads; RLIMIT_NPROC would not do, the kernel does not apply it to root
    clone=(56, 220), clone3=(435, 435), fork=(57, None), vfork=(58, None),
    # memory that RLIMIT_AS does not count
    memfd_create=(319, 279), memfd_secret=(447, 447), shmget=(29, 194), semget=(64, 190), msgget=(68, 186), mq_open=(240, 180),
    io_uring_setup=(425, 425),
    # ways out; a network namespace does not cover every socket family (vsock reaches the host of a virtual machine)
    socket=(41, 198), ptrace=(101, 117), process_vm_readv=(310, 270), process_vm_writev=(311, 271), pidfd_getfd=(438, 438),
    unshare=(272, 97), setns=(308, 268), keyctl=(250, 219), add_key=(248, 217), request_key=(249, 218), bpf=(321, 280),
    perf_event_open=(298, 241), userfaultfd=(323, 282), syslog=(103, 116),
    getrandom=(318, 278),  # without it Python reads /dev/urandom, which is /dev/zero in there
)  # fmt: skip
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of DENIED, AUDIT_ARCH of linux/audit.h


def require_sandbox(unsafe: bool) -> None:
    """Run a trivial program, unless `unsafe`. Raises ValueError, one line, if the sandbox cannot run here."""
    way_out = "or pass --unsafe-sandbox, and what the model writes runs with all your rights"
    if unsafe:
        return
    if platform.machine() not in MACHINES:
        raise ValueError(f"the sandbox knows the system calls of {' and '.join(MACHINES)}, not of {platform.machine()}: use one, {way_out}")
    if not shutil.which("bwrap"):
        raise ValueError(f"running a model's code needs bubblewrap: apt-get install bubblewrap (dnf and pacman have it too), {way_out}")
    output = run_python("print('ready')", timeout=30)  # the first call may read Python from a slow disk
    if output != "ready\n":
        said = " ".join(output.split()) or "nothing was printed"
        raise ValueError(f"bubblewrap (0.7 or newer) does not work here: {said}; allow user namespaces, which containers often forbid, {way_out}")


def run_python(code: str, timeout: float = 5.0, memory_mb: int = 512, unsafe: bool = False) -> str:
    """Run `code` as a program for at most `timeout` seconds in `memory_mb` MB, and return what it printed, stdout and stderr
    in order. A last line in brackets says so if it was stopped, ran out of memory or printed more than SHOWN_OUTPUT bytes.

    Nothing that the code does raises here. Thread-safe. `unsafe` leaves the sandbox away and keeps the limits.
    """
    limits = {"as": memory_mb << 20, "cpu": math.ceil(timeout) + 1, "fsize": TMP_BYTES, "stack": 8 << 20, "nofile": 64, "core": 0}
    command = ["prlimit", *(f"--{name}={value}:{value}" for name, value in limits.items())]  # hard limits, both of them
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as home:
        pathlib.Path(home, "main.py").write_text(code, encoding="utf-8", errors="replace")
        if unsafe:
            output, ending, status = _run([*command, sys.executable, "-u", "main.py"], timeout, cwd=home, env=ENV | {"HOME": home})
        else:
            filter_fd, write_end = os.pipe()
            os.write(write_end, _seccomp_filter())
            os.close(write_end)
            python = os.path.realpath(sys.executable)
            command = [*_bubblewrap(home), "--seccomp", str(filter_fd), *command, "setarch", "-R", python, "-u", "-s", "main.py"]
            try:
                output, ending, status = _run(command, timeout, env=ENV, pass_fds=[filter_fd])
            finally:
                os.close(filter_fd)
    # control characters could act on whoever's terminal shows a sample
    text = output.decode(errors="replace").replace("\r\n", "\n")
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    notes = [ending] if ending else []
    number = -status if status < 0 else status - 128  # bubblewrap passes a signal on as 128 + its number
    if not ending and number in set(signal.Signals):
        notes.append(f"killed by {signal.Signals(number).name}")
    if not ending and "MemoryError" in text.rstrip().rpartition("\n")[2]:
        notes.append(f"ran out of memory, {memory_mb} MB")
    raw = text.encode()
    if len(raw) > SHOWN_OUTPUT:
        first, last = raw[: SHOWN_OUTPUT // 2], raw[-SHOWN_OUTPUT // 2 :]
        text = f"{first.decode(errors='ignore')}\n[...]\n{last.decode(errors='ignore')}"
        notes.append(f"output cut in the middle, {SHOWN_OUTPUT} of {len(raw)} bytes shown")
    if notes:
        text += ("" if text.endswith("\n") or not text else "\n") + f"[{'; '.join(notes)}]\n"
    return text


def _run(command: list[str], timeout: float, **options) -> tuple[bytearray, str, int]:
    """(output, why it was stopped or "", exit status) of a command that is given `timeout` seconds and MAX_OUTPUT bytes."""
    deadline = time.monotonic() + timeout
    # No preexec_fn: other threads run. The new session has no terminal; bubblewrap must not make another (--new-session), for
    # killpg then reaches all of it at any moment, its process 1 included, which takes everything in its namespace along.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, **options
    )
    output, ending = bytearray(), ""
    out, exited = process.stdout.fileno(), os.pidfd_open(process.pid)
    poller = select.poll()
    poller.register(out, select.POLLIN)
    poller.register(exited, select.POLLIN)
    try:
        while not ending:
            left = deadline - time.monotonic()
            ready = [fd for fd, _ in poller.poll(max(left, 0) * 1000)]
            if out in ready and left > 0:
                chunk = os.read(out, min(1 << 16, MAX_OUTPUT + 1 - len(output)))  # so the same bytes on every run
                output += chunk
                if not chunk:
                    poller.unregister(out)
                if len(output) > MAX_OUTPUT:
                    ending = f"stopped after {MAX_OUTPUT} bytes of output"
            elif exited in ready:
                break  # and all that it wrote is read
            else:
                ending = f"timed out after {timeout:g} s"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # it is not reaped yet, so the number is still its own
        status = process.wait()
        process.stdout.close()
        os.close(exited)
    return output, ending, status


def _bubblewrap(home: str) -> list[str]:
    """The bwrap command up to the program to run: what is mounted, and everything else unshared. `home` holds main.py."""
    prefix, site = os.path.realpath(sys.base_prefix), sysconfig.get_path("platlib")
    command = [shutil.which("bwrap"), "--unshare-all", "--die-with-parent", "--hostname", "sandbox"]
    command += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--ro-bind", f"{home}/main.py", "/tmp/main.py", "--chdir", "/tmp"]
    # of /usr and of Python's own folder only the parts that it needs: projects live under /usr/src, passwords in pip.conf
    parts = ["/usr/bin", "/usr/lib", "/usr/lib64", "/lib", "/lib64", f"{prefix}/bin", f"{prefix}/lib", "/usr/share/zoneinfo"]
    for path in [*parts, "/etc/ld.so.cache", "/etc/alternatives"]:
        command += ["--ro-bind-try", path, path]
    for name in PACKAGES:
        command += ["--ro-bind-try", f"{site}/{name}", f"/packages/{name}"]
    for device, name in [("null", "null"), ("zero", "zero"), ("zero", "urandom")]:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{name}"]
    return [*command, "--remount-ro", "/"]


def _seccomp_filter() -> bytes:
    """The classic BPF program that denies DENIED: an array of struct sock_filter (linux/filter.h), see seccomp(2)."""
    column, arch = MACHINES[platform.machine()]
    numbers = [row[column] for row in DENIED.values() if row[column] is not None]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, 0x80000000)]  # another instruction set: kill
    program += [(load, 0, 0, 0), (at_least, len(numbers) + 1, 0, 0x40000000)]  # x32 has numbers of its own: deny
    program += [(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | 1)]  # allow; deny with EPERM
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
