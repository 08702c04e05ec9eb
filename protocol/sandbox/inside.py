"""Isolates its own process and then becomes the program: a stand-alone script without imports of Sluice.

    python -I -S inside.py '{"program_fd": .., "folder": .., "python": .., "visible": [..], ..}'

The program sees only the system's libraries and Python, read-only, and an empty folder. It has no network, no other
processes and no host name. Two parent processes wait for it: the starter, and the first process of its PID namespace.
If isolation fails, the program is not started, and `report_fd` receives the reason.
"""

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any, NoReturn

_NOBODY = 65534
_NEWNS, _NEWUTS, _NEWIPC = 0x00020000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_KEPT_FLAGS = 2 | 4 | 8 | 1024 | 2048 | 4096  # of statvfs: nosuid, nodev, noexec, noatime, nodiratime, relatime
_DETACH = 2
_PDEATHSIG, _SECCOMP, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 22, 24, 38
_FILTER = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_WORK = "/work"
_MAX_FILES = 10_000
_CHECK_S = 0.05
_LOW_PRIORITY = 5  # a third of a normal priority's share: less would starve a program on a busy machine

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    spec = json.loads(sys.argv[1])
    with open(spec["program_fd"], "rb") as file:
        program = file.read()
    os.set_inheritable(spec["report_fd"], False)  # the program does not inherit it
    libc.prctl(_PDEATHSIG, signal.SIGKILL)
    if not spec["is_isolated"]:
        _limit(spec)
        os.chdir(spec["folder"])
        _become(spec["python"], ["-c", program.decode()], spec["folder"])
    try:
        is_root = _separate()
        # The child is the first process of the PID namespace: when it ends, the kernel kills all others in it.
        ours, theirs = os.pipe()
        child = os.fork()
    except OSError as error:
        _report(spec, error)
    if child:
        _exit_like(child)
    _die_with_parent(ours, theirs)
    try:
        _enter(spec, program)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        # The first process of a namespace ignores most signals, so the program is the second.
        if (child := os.fork()) != 0:
            _guard(child, spec["memory_bytes"], spec["lower_priority_after_s"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        _limit(spec)
        _drop_rights(is_root, spec["uid"])
        _refuse_calls(bytes.fromhex(spec["refused_calls"]))
    except OSError as error:
        _report(spec, error)
    _become(spec["python"], [f"{_WORK}/main.py"], _WORK)


def _die_with_parent(ours: int, theirs: int) -> None:
    """Get killed with the parent. theirs: the pipe end that only a live parent still holds."""
    libc.prctl(_PDEATHSIG, signal.SIGKILL)
    os.close(theirs)
    if select.select([ours], [], [], 0)[0]:  # the parent died before prctl
        os._exit(1)
    os.close(ours)


def _exit_like(child: int) -> NoReturn:
    """Exit with the status of a child."""
    while (ended := os.wait()) and ended[0] != child:
        pass
    _exit_as(ended[1])


def _exit_as(status: int) -> NoReturn:
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _guard(child: int, memory_bytes: int, lower_after_s: float | None) -> NoReturn:
    """Exit with the status of a child; kill all processes when they exceed the memory limit together."""
    lower_at = None if lower_after_s is None else time.monotonic() + lower_after_s
    while True:
        signal.sigtimedwait([signal.SIGCHLD], _CHECK_S)
        if lower_at is not None and time.monotonic() > lower_at:
            lower_at = None
            _lower_priority()
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == child:
                _exit_as(ended[1])
        if _memory("statm") > memory_bytes and _memory("smaps_rollup") > memory_bytes:
            os.kill(-1, signal.SIGKILL)


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PGRP, 0, _LOW_PRIORITY)
    try:
        # Where the kernel shares processors between sessions, a priority counts inside its session only.
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(_LOW_PRIORITY))
    except OSError:
        pass  # no such sharing


def _memory(how: str) -> int:
    """Return the memory of all processes in bytes. statm counts shared pages per process; smaps_rollup once."""
    total = 0
    for name in os.listdir("/proc"):
        if not name.isdecimal() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/{how}") as file:
                text = file.read()
        except OSError:  # the process has ended
            continue
        if how == "statm":
            total += int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
        else:
            total += sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def _separate() -> bool:
    """Leave the namespaces of the host; return whether that worked as root, without a user namespace."""
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    if os.geteuid() == 0 and libc.unshare(flags) == 0:
        return True
    own_uid, own_gid = os.geteuid(), os.getegid()
    _check(libc.unshare(flags | _NEWUSER), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {own_uid} 1"), ("gid_map", f"0 {own_gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return False


def _enter(spec: dict[str, Any], program: bytes) -> None:
    """Replace the root by the visible paths and a writable work folder; unmount the host's root."""
    root = spec["folder"]
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path in spec["visible"]:
        _bind(root, path)
    for name in ("proc", "old", _WORK[1:]):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    os.symlink("/proc/self/fd/0", f"{root}/dev/stdin")
    _mount(
        "tmpfs",
        root + _WORK,
        "tmpfs",
        _NOSUID | _NODEV,
        f"size={spec['memory_bytes'] // 4},nr_inodes={_MAX_FILES},mode=777",
    )
    with open(f"{root}{_WORK}/main.py", "wb") as file:
        file.write(program)
    os.chmod(f"{root}{_WORK}/main.py", 0o644)
    libc.mount(b"proc", f"{root}/proc".encode(), b"proc", _NOSUID | _NODEV, None)  # some containers forbid it
    _check(libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], root.encode(), f"{root}/old".encode()), "pivot_root")
    os.chdir("/")
    _check(libc.umount2(b"/old", _DETACH), "umount")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir(_WORK)


def _bind(root: str, path: str) -> None:
    """Mount a file or folder of the host in the new root, read-only."""
    target = root + path
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, _BIND | _REC)
    is_device = path.startswith("/dev/")
    kept = os.statvfs(path).f_flag & _KEPT_FLAGS
    _mount(None, target, None, _REMOUNT | _BIND | _NOSUID | kept | (0 if is_device else _RDONLY | _NODEV))


def _limit(spec: dict[str, Any]) -> None:
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, spec["memory_bytes"]),
        (resource.RLIMIT_FSIZE, spec["memory_bytes"] // 4),
        (resource.RLIMIT_NOFILE, 128),
    ):
        resource.setrlimit(limit, (value, value))
    # The soft limit ends a program with SIGXCPU, which the caller recognises; the hard limit cannot be caught.
    resource.setrlimit(resource.RLIMIT_CPU, (spec["cpu_s"], spec["cpu_s"] + 1))
    if spec["is_isolated"]:  # otherwise it would count the user's other processes too
        resource.setrlimit(resource.RLIMIT_NPROC, (spec["num_processes"], spec["num_processes"]))


def _drop_rights(is_root: bool, uid: int) -> None:
    """Give up all rights for good. uid: unique to the program, because the kernel counts processes per user id."""
    if is_root:
        os.setgroups([])
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError:  # the container maps few ids
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    else:
        for capability in range(64):
            libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        _check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    libc.prctl(_PDEATHSIG, signal.SIGKILL)


def _refuse_calls(code: bytes) -> None:
    """Install a system call filter. code: the BPF program; empty on an unknown machine."""
    if code:
        array = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("@HP", len(code) // 8, ctypes.addressof(array))
        _check(libc.prctl(_SECCOMP, _FILTER, program, 0, 0), "seccomp")


def _become(python: str, arguments: list[str], folder: str) -> NoReturn:
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    os.execve(python, [python, "-I", "-S", "-B", *arguments], environment)  # noqa: S606


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [each.encode() if each is not None else None for each in (source, target, kind)]
    _check(libc.mount(*encoded, flags, options.encode() or None), f"mount {target}")


def _check(returned: int, call: str) -> None:
    if returned != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _report(spec: dict[str, Any], error: OSError) -> NoReturn:
    os.write(spec["report_fd"], str(error).encode())
    os._exit(1)


if __name__ == "__main__":
    main()
