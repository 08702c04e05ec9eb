"""The system calls that the sandbox refuses, as a seccomp BPF filter.

Namespaces hide the host. The filter closes the parts of the kernel that a program does not need: new namespaces,
mounts, memory of other processes, keys, kernel modules, sockets outside network namespaces (vsock), and memory outside
the limits (memfd, System V).
"""

import errno
import os
import struct

# name: (number on x86-64, number on AArch64); -1: does not exist
_REFUSED: dict[str, tuple[int, int]] = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "swapon": (167, 224), "swapoff": (168, 225), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "fanotify_init": (300, 262), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116), "personality": (135, 92),
    "vhangup": (153, 58), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1), "uselib": (134, -1),
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_NEW_NAMESPACES = 0x7E020080  # of clone's flags: users, processes, network, mounts, IPC, names, control groups, time
_FAMILIES = (1, 2, 10)  # of sockets: unix, IPv4, IPv6
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000  # first number of the x32 table
_LOAD, _EQUALS, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def refusing_filter(machine: str = "") -> bytes:
    """Return the filter for a machine, this one by default; empty for an unknown machine."""
    if (machine or os.uname().machine) not in _MACHINES:
        return b""
    place, kind = _MACHINES[machine or os.uname().machine]
    refuse = _op(_RETURN, _ERROR | errno.EPERM)
    allow = _op(_RETURN, _ALLOW)
    code = [
        _op(_LOAD, _MACHINE_AT),
        _op(_EQUALS, kind, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER_AT),
    ]
    code += [_op(_AT_LEAST, _X32, 0, 1), refuse]
    for numbers in _REFUSED.values():
        if (number := numbers[place]) >= 0:
            code += [_op(_EQUALS, number, 0, 1), refuse]
    # A filter cannot read its flags, which are in memory. The C library then falls back to clone.
    code += [_op(_EQUALS, _CLONE3[place], 0, 1), _op(_RETURN, _ERROR | errno.ENOSYS)]
    code += [_op(_EQUALS, _CLONE[place], 0, 4), _op(_LOAD, _FIRST_ARGUMENT_AT)]
    code += [_op(_HAS_BIT, _NEW_NAMESPACES, 0, 1), refuse, allow]
    code += [_op(_EQUALS, _SOCKET[place], 0, 2 + len(_FAMILIES)), _op(_LOAD, _FIRST_ARGUMENT_AT)]
    code += [_op(_EQUALS, family, len(_FAMILIES) - at, 0) for at, family in enumerate(_FAMILIES)]
    return b"".join([*code, refuse, allow])


def _op(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one BPF instruction. if_true, if_false: number of following instructions to skip."""
    return struct.pack("=HBBI", operation, if_true, if_false, value)
