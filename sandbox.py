"""Runs Python that a model wrote: bubblewrap's namespaces, a seccomp filter and resource limits. Linux only.

The program sees Python's standard library, numpy and sympy, read-only, and a /tmp of its own. It is one process with one
thread, so the limits on its address space and on its /tmp bound its memory. It has no network, no /proc and nothing of ours.
Hash seed, addresses and random seeds are the same in every call: a program that does not ask for the time has one output.
"""

import os
import re
import select
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile

SHOWN_OUTPUT = 8192  # bytes; the middle of longer output is left out
FILE_BYTES = 4 << 20  # of any one file, the output among them
TMP_BYTES = 64 << 20  # of all files in the program's /tmp
PACKAGES = ("numpy", "numpy.libs", "sympy", "mpmath")  # what it can import besides the standard library
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONPATH": "/packages", "PYTHONHASHSEED": "0",
       "OPENBLAS_NUM_THREADS": "1"}  # numpy would start threads; fmt: skip
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of DENIED, AUDIT_ARCH of linux/audit.h

# System calls that fail with EPERM, by their numbers on x86_64 and aarch64: those that make processes and threads
# (RLIMIT_NPROC is not applied to root) or memory that RLIMIT_AS does not count; ways out (the network namespace does not hold
# vsock, which reaches a virtual machine's host); and getrandom, so that seeds come from /dev/urandom, which is /dev/zero there.
DENIED = dict(
    clone=(56, 220), clone3=(435, 435), fork=(57, None), vfork=(58, None), memfd_create=(319, 279), memfd_secret=(447, 447),
    shmget=(29, 194), semget=(64, 190), msgget=(68, 186), mq_open=(240, 180), io_uring_setup=(425, 425),
    socket=(41, 198), ptrace=(101, 117), process_vm_readv=(310, 270), process_vm_writev=(311, 271), unshare=(272, 97),
    keyctl=(250, 219), add_key=(248, 217), request_key=(249, 218), bpf=(321, 280), perf_event_open=(298, 241),
    syslog=(103, 116), getrandom=(318, 278),
)  # fmt: skip


def require_sandbox(unsafe: bool) -> None:
    """Try the sandbox, unless `unsafe`. Raises ValueError, one line that says what to install or allow, if it does not work."""
    try:
        said = "ready" if unsafe else run_python("print('ready')", timeout=30)  # the first call may wait for a slow disk
    except (OSError, KeyError) as error:  # no bwrap; a machine that is not in MACHINES
        said = str(error)
    if (said := " ".join(said.split())) != "ready":
        raise ValueError(f"the sandbox does not work here ({said}): apt-get install bubblewrap (0.7 or newer, for x86_64 or aarch64), "
                         "allow user namespaces (containers often forbid them), or use --unsafe-sandbox")  # fmt: skip


def run_python(code: str, timeout: float = 5.0, memory_mb: int = 512, unsafe: bool = False) -> str:
    """What the program `code` prints, stdout and stderr in order, in at most `timeout` seconds and `memory_mb` MB. A last line
    in brackets says so if it timed out, ran out of memory, was killed, or printed more than SHOWN_OUTPUT bytes.

    Raises for nothing that the code does. Thread-safe. `unsafe` keeps the limits, as far as they go, and nothing else.
    """
    limits = {"as": memory_mb << 20, "cpu": int(timeout) + 2, "fsize": FILE_BYTES, "stack": 8 << 20, "nofile": 64, "core": 0}
    command = ["prlimit", *(f"--{name}={value}:{value}" for name, value in limits.items())]  # soft:hard
    with (tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as home, open(f"{home}/main.py", "wb", 0) as main,
          open(f"{home}/output", "wb+") as output, open(f"{home}/denied", "wb+") as denied):  # fmt: skip
        main.write(code.encode(errors="replace"))
        if unsafe:
            command += [sys.executable, "-u", "main.py"]
        else:
            os.pwrite(denied.fileno(), _seccomp_filter(), 0)  # bubblewrap reads on from where the file stands: 0
            command = [*_bubblewrap(home), "--seccomp", str(denied.fileno()), *command]
            command += ["setarch", "-R", os.path.realpath(sys.executable), "-u", "-s", "main.py"]  # -R: fixed addresses
        # Output goes to a file, not a pipe: the limit on files ends it, at the same byte on every run. The session has no
        # terminal, and killpg reaches all of it: with bwrap --new-session, a call that is stopped while bwrap is setting up can
        # leave its program running. No preexec_fn: other threads run.
        process = subprocess.Popen(command, cwd=home, env=ENV, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   pass_fds=[denied.fileno()], start_new_session=True)  # fmt: skip
        ended, poller = os.pidfd_open(process.pid), select.poll()
        poller.register(ended, select.POLLIN)
        try:
            notes = [] if poller.poll(1000 * timeout) else [f"timed out after {timeout:g} s"]
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # before wait: until then the number is its own
            status = process.wait()
            os.close(ended)
        text = os.pread(output.fileno(), FILE_BYTES, 0).decode(errors="replace")
    # control characters, and those that turn the direction of writing, act on the terminal that shows a sample
    text = re.sub("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "\ufffd", re.sub("\r\n?", "\n", text))
    number = abs(status) % 128  # of the signal: -number from Popen, 128 + number from bubblewrap
    if not notes and (status < 0 or status > 128) and number in list(signal.Signals):
        notes = [f"killed by {signal.Signals(number).name}"]
    elif not notes and status and "MemoryError" in text.rstrip().rpartition("\n")[2]:
        notes = [f"ran out of memory, {memory_mb} MB"]
    if len(data := text.encode()) > SHOWN_OUTPUT:
        halves = data[: SHOWN_OUTPUT // 2], data[-SHOWN_OUTPUT // 2 :]
        text = "\n[...]\n".join(half.decode(errors="ignore") for half in halves)
        notes.append(f"output cut in the middle, {SHOWN_OUTPUT} of {len(data)} bytes shown")
    if notes:
        text += "\n" * (text[-1:] not in ("", "\n")) + f"[{'; '.join(notes)}]\n"
    return text


def _bubblewrap(home: str) -> list[str]:
    """The bwrap command up to the program to run. `home` holds main.py."""
    prefix, site = os.path.realpath(sys.base_prefix), sysconfig.get_path("platlib")
    command = (f"bwrap --unshare-all --cap-drop ALL --die-with-parent --hostname sandbox --size {TMP_BYTES} --tmpfs /tmp --chdir /tmp "
               "--dev-bind /dev/null /dev/null --dev-bind /dev/zero /dev/zero --dev-bind /dev/zero /dev/urandom").split()  # fmt: skip
    # only parts of /usr and of Python's folder: projects live under /usr/src, passwords in a pip.conf
    paths = ["/usr/bin", "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
    mounts = [(path, path) for path in [*paths, f"{prefix}/bin", f"{prefix}/lib"]]
    mounts += [(f"{site}/{name}", f"/packages/{name}") for name in PACKAGES]
    for source, target in [*mounts, (f"{home}/main.py", "/tmp/main.py")]:
        command += ["--ro-bind-try", source, target]
    return [*command, "--remount-ro", "/"]


def _seccomp_filter() -> bytes:
    """A classic BPF program that denies DENIED: an array of struct sock_filter of linux/filter.h, see seccomp(2)."""
    column, arch = MACHINES[os.uname().machine]
    numbers = [row[column] for row in DENIED.values() if row[column] is not None]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, 0x80000000)]  # another instruction set: kill
    program += [(load, 0, 0, 0), (at_least, len(numbers) + 1, 0, 0x40000000)]  # x32, which numbers otherwise: deny
    program += [(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | 1)]  # allow; or fail with EPERM
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
