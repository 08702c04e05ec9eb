"""The filter of system calls, as the kernel would run it: an interpreter of its own says what it answers."""

import struct

import pytest

from protocol.sandbox.system_calls import refusing_filter

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
X86, ARM = 0xC000003E, 0xC00000B7


def _answer(code: bytes, machine: int, number: int, argument: int = 0) -> int:
    data = struct.pack("=IIQQ", number, machine, 0, argument)
    value, at = 0, 0
    while True:
        operation, if_true, if_false, given = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if operation == 0x06:
            return int(given)
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, given)
        else:
            holds = {0x15: value == given, 0x35: value >= given, 0x45: bool(value & given)}[operation]
            at += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "kind", "number", "argument", "answer"),
    [
        ("x86_64", X86, 0, 0, ALLOW),  # read
        ("x86_64", X86, 59, 0, ALLOW),  # execve
        ("x86_64", X86, 101, 0, EPERM),  # ptrace
        ("x86_64", X86, 443, 0, EPERM),  # quotactl_fd
        ("x86_64", X86, 435, 0, ENOSYS),  # clone3
        ("x86_64", X86, 56, 0x3D0F00, ALLOW),  # clone, for a thread
        ("x86_64", X86, 56, 0x1200011, ALLOW),  # clone, for a fork
        ("x86_64", X86, 56, 0x10000011, EPERM),  # clone, with users of its own
        ("x86_64", X86, 56, 0x40000011, EPERM),  # clone, with a network of its own
        ("x86_64", X86, 41, 1, ALLOW),  # socket, unix
        ("x86_64", X86, 41, 2, ALLOW),
        ("x86_64", X86, 41, 10, ALLOW),
        ("x86_64", X86, 41, 40, EPERM),  # socket, vsock
        ("x86_64", X86, 0x40000000 + 101, 0, EPERM),  # the other table
        ("x86_64", ARM, 0, 0, KILL),
        ("x86_64", 0x40000003, 26, 0, KILL),  # 32 bits
        ("aarch64", ARM, 63, 0, ALLOW),  # read
        ("aarch64", ARM, 117, 0, EPERM),  # ptrace
        ("aarch64", ARM, 101, 0, ALLOW),  # nanosleep, which is ptrace elsewhere
        ("aarch64", ARM, 198, 40, EPERM),
        ("aarch64", ARM, 198, 2, ALLOW),
        ("aarch64", ARM, 220, 0x10000011, EPERM),
    ],
)
def test_filter_answers_each_call(machine: str, kind: int, number: int, argument: int, answer: int) -> None:
    assert _answer(refusing_filter(machine), kind, number, argument) == answer


def test_unknown_machine_has_no_filter() -> None:
    assert refusing_filter("riscv64") == b""
