"""Programs that try to get out of the sandbox, or to take more than their share. Each prints "out" if it succeeds.

{names} in braces are the host's: a file and its folder, a port, the names of sockets and of shared memory, a process.
"""

_LIBC = "import ctypes, os; c = ctypes.CDLL(None, use_errno=True)"

FILES = {
    "read a file of the host": "print('out' if open({secret}).read() else '')",
    "list the host's folders": "import os; print('out' if {folder} in os.listdir('/tmp') else '')",
    "read accounts": "open('/etc/passwd'); print('out')",
    "read passwords": "open('/etc/shadow'); print('out')",
    "read the root's home": "import os; os.listdir('/root/.ssh'); print('out')",
    "write beside Python": "import sys; open(sys.base_prefix + '/lib/x', 'w'); print('out')",
    "write into /usr": "open('/usr/lib/x', 'w'); print('out')",
    "write into the root": "open('/x', 'w'); print('out')",
    "write through a link": "import os; os.symlink('/usr/lib/x', 'l'); open('l', 'w'); print('out')",
    "write through a second name": """
import glob, os
os.link(glob.glob('/usr/bin/*')[0], 'l')
open('l', 'ab')
print('out')
""",
    "climb by dots": "print('out' if open('../' * 40 + {secret}).read() else '')",
    "climb by an open folder": """
import os
at = os.open('/', os.O_RDONLY)
print('out' if os.open('../../..' + {secret}, os.O_RDONLY, dir_fd=at) else '')
""",
    "follow the root of its guard": "import os; print('out' if 'home' in os.listdir('/proc/1/root') else '')",
    "follow its guard's folder": "import os; print('out' if os.listdir('/proc/1/cwd') else '')",
    "leave by chroot": "import os; os.chroot('/proc/1/root'); print('out')",
    "find the old root": "import os; print('out' if os.listdir('/old') else '')",
    "mount": f"{_LIBC}; print('out' if c.mount(b'none', b'/work', b'tmpfs', 0, None) == 0 else '')",
    "make the root writable": f"{_LIBC}; print('out' if c.mount(None, b'/', None, 32 | 4096, None) == 0 else '')",
    "unmount what hides the host": f"{_LIBC}; print('out' if c.umount2(b'/work', 2) == 0 else '')",
    "open a file by its handle": f"{_LIBC}; print('out' if c.syscall(304, -100, b'0' * 16, 0) >= 0 else '')",
    "make a device": "import os; os.mknod('d', 0o20666, os.makedev(1, 1)); open('d', 'rb'); print('out')",
    "make a disk": "import os; os.mknod('d', 0o60666, os.makedev(8, 0)); open('d', 'rb'); print('out')",
    "read the kernel's memory": "open('/proc/kcore', 'rb').read(1); print('out')",
    "read the kernel's log": f"{_LIBC}; b = bytes(99); print('out' if c.klogctl(3, b, 99) >= 0 else '')",
    "change the kernel": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh'); print('out')",
    "press a key of the kernel": "open('/proc/sysrq-trigger', 'w').write('h'); print('out')",
    "open the terminal": "open('/dev/tty', 'w'); print('out')",
}
PROCESSES = {
    "kill a process of the host": "import os; os.kill({pid}, 0); print('out')",
    "stop its guard": """
import os, time
for number in (9, 19):
    os.kill(1, number)
    os.kill(os.getppid(), number)
time.sleep(0.2)
print('out' if open('/proc/1/stat').read().rpartition(')')[2].split()[0] == 'T' else '')
""",
    "see processes of the host": "import os; print('out' if str({pid}) in os.listdir('/proc') else '')",
    "open the memory of its guard": "open('/proc/1/mem', 'rb').read(1); print('out')",
    "read its guard's environment": "print('out' if open('/proc/1/environ').read() else '')",
    "trace its guard": f"{_LIBC}; print('out' if c.ptrace(16, 1, 0, 0) == 0 else '')",
    "read its guard's memory": f"{_LIBC}; print('out' if c.syscall(310, 1, 0, 0, 0, 0, 0) >= 0 else '')",
    "take its guard's files": f"""
{_LIBC}
guard = c.syscall(434, 1, 0)
print('out' if c.syscall(438, guard, 0, 0) >= 0 else '')
""",
    "read the environment": "import os; print('out' if 'SECRET_OF_THE_HOST' in os.environ else '')",
    "use a file that its starter had open": """
import os
for number in range(3, 128):
    try:
        os.fstat(number)
    except OSError:
        continue
    if not os.readlink(f'/proc/self/fd/{number}').startswith('/work/'):
        print('out')
""",
    "become root": "import os; os.setuid(0) if os.getuid() else os.chown('/usr', 1, 1); print('out')",
    "get rights by a program": "import os; os.system('mount -t tmpfs x /usr && echo out')",
    "become another user by a program": "import os; os.system('su -c \"echo out\" </dev/null; sudo -n echo out')",
    "get rights in a namespace of users": f"{_LIBC}; print('out' if c.unshare(0x10000000) == 0 else '')",
    "start a process in one": f"{_LIBC}; print('out' if c.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0 else '')",
    "join the namespaces of its guard": f"""
{_LIBC}
print('out' if c.setns(os.open('/proc/1/ns/net', 0), 0) == 0 else '')
""",
    "run kernel code": f"{_LIBC}; print('out' if c.syscall(321, 5, bytes(128), 128) >= 0 else '')",
    "load a module": f"{_LIBC}; print('out' if c.syscall(313, 0, b'', 0) == 0 else '')",
    "read keys": f"{_LIBC}; print('out' if c.syscall(250, 0, -3, 1) >= 0 else '')",
    "go before all others": "import os; os.nice(-5); print('out')",
    "run in real time": "import os; os.sched_setscheduler(0, 1, os.sched_param(1)); print('out')",
    "stay behind": """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.closerange(0, 128)
        time.sleep(600)
    os._exit(0)
""",
}
NETWORK = {
    "connect to the world": "import socket; socket.create_connection(('1.1.1.1', 53), 2); print('out')",
    "connect to this host": "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('out')",
    "ask for a name": "import socket; socket.getaddrinfo('example.org', 80); print('out')",
    "connect to a socket without a file": """
import socket
socket.socket(socket.AF_UNIX).connect('\\0' + {abstract})
print('out')
""",
    "listen to the wire": "import socket; socket.socket(17, 3, 3); print('out')",
    "talk to the machine below": "import socket; socket.socket(40, 1); print('out')",
    "talk to the kernel": "import socket; socket.socket(16, 3, 0); print('out')",
    "attach the host's shared memory": f"{_LIBC}; print('out' if c.shmget({{shared}}, 0, 0) >= 0 else '')",
    "share memory under a name": "open('/dev/shm/x', 'w'); print('out')",
    "name the host": "import socket; socket.sethostname('x'); print('out')",
}
SHARES = {
    "raise its limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40)); print('out')",
    "fork without end": """
import os, time
for _ in range(1000):
    if not os.fork():
        time.sleep(30)
print('out')
""",
    "threads without end": """
import threading, time
for _ in range(1000):
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
print('out')
""",
    "take all memory": "x = bytearray(4 << 30); print('out')",
    "take all memory, a share in each process": """
import os, time
for _ in range(20):
    if not os.fork():
        break
x = bytearray(60 << 20)
for at in range(0, len(x), 4096):
    x[at] = 1
time.sleep(30)
print('out')
""",
    "take memory that no process shows": """
import os
for _ in range(20):
    os.write(os.memfd_create('x'), bytes(60 << 20))
print('out')
""",
    "unpack a bomb": """
import zlib
packing = zlib.compressobj(1)
packed = b''.join(packing.compress(bytes(1 << 20)) for _ in range(300)) + packing.flush()
x = zlib.decompress(packed)
print('out')
""",
    "a text without end": "x = 'x' * 10**12; print('out')",
    "a list without end": "x = list(range(10**10)); print('out')",
    "recurse without end": """
import sys
sys.setrecursionlimit(10**9)
def f(n):
    return [f(n + 1)]
f(0)
print('out')
""",
    "fill the disk": "open('a', 'wb').write(bytes(200 << 20)); print('out')",
    "files without end": """
for number in range(100_000):
    open(str(number), 'w').close()
print('out')
""",
    "open files without end": "x = [open('/dev/zero') for _ in range(1000)]; print('out')",
    "a hole in a file": "open('a', 'wb').truncate(1 << 40); print('out')",
}
ESCAPES = {**FILES, **PROCESSES, **NETWORK, **SHARES}

# Each would hang: it ends by its limit, and everything that it started with it.
HANGING = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(600)",
    "a number without end": "9 ** 9 ** 9",
    "deaf to signals": """
import signal, time
for number in set(range(1, 65)) - {9, 19, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
while True:
    time.sleep(1)
""",
    "nothing printed": "import os, time; os.close(1); os.close(2); time.sleep(600)",
    "children behind": "import os, time\nfor _ in range(4):\n    os.fork()\nos.setpgid(0, 0)\ntime.sleep(600)",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "a read of nothing": "import os; r, w = os.pipe(); os.read(r, 1)",
    "a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "errors without end": "import logging\nwhile True: logging.error('x' * 999)",
    "floods on both streams": "import sys\nwhile True:\n    print('x' * 999)\n    print('x' * 999, file=sys.stderr)",
    "a regular expression": "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
}
