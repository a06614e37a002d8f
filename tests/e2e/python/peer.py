"""A worker in plain Python: the whole protocol with nothing but the standard library, well-behaved or not.

The socket is its standard input. `peer.py KIND`: `honest`, or a misbehaviour of `MISCHIEF`.
"""

import array, base64, ctypes, fcntl, hashlib, json, math, mmap, os, re, socket, struct, sys, threading, time, zlib

F_ADD_SEALS = 1033
SEAL, SHRINK, GROW, WRITE, FUTURE_WRITE = 1, 2, 4, 8, 16
SEALED = SEAL | SHRINK | GROW | WRITE
LENT = SEAL | SHRINK | GROW | FUTURE_WRITE

SIZES = {"bool": 1, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "f16": 2, "bf16": 2, "u32": 4, "i32": 4, "f32": 4,
         "u64": 8, "i64": 8, "f64": 8, "c64": 8, "c128": 16}

wire = socket.socket(fileno=os.dup(0))
null = os.open("/dev/null", os.O_RDWR)
os.dup2(null, 0)
pending = []


# Frames: four bytes of length, two of a count of descriptors, and JSON; the descriptors ride the first byte.

def send_raw(data, fds=()):
    sent = 0
    if fds:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        sent = wire.sendmsg([data], rights)
    wire.sendall(data[sent:])


def send(message, fds=(), count=None):
    text = message if isinstance(message, bytes) else dump(message).encode()
    send_raw(struct.pack(">IH", len(text), len(fds) if count is None else count) + text, fds)


def receive():
    def exactly(count):
        data = b""
        while len(data) < count:
            piece, ancillary, _, _ = wire.recvmsg(count - len(data), socket.CMSG_SPACE(4 * 253))
            for _, kind, rights in ancillary:
                if kind == socket.SCM_RIGHTS:
                    pending.extend(array.array("i", rights))
            if not piece:
                sys.exit(0)
            data += piece
        return data
    length, count = struct.unpack(">IH", exactly(6))
    text = exactly(length)
    fds = pending[:count]
    del pending[:count]
    return load(text.decode()), fds


# Numbers keep how they were written: 1 is an integer, and 1.0 is none.

class Float(float):
    pass


def load(text):
    return json.loads(text, parse_float=Float)


def dump(message):
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))


# Memory.

def memfd(contents, seals, length=None):
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, contents)
    if length is not None:
        os.ftruncate(fd, length)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


def lent(contents):
    """A block that this process can still write, and nobody else can; and how."""
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, -len(contents) // mmap.PAGESIZE * -mmap.PAGESIZE)
    mine = mmap.mmap(fd, len(contents))
    mine[:] = contents
    fcntl.fcntl(fd, F_ADD_SEALS, LENT)
    return fd, mine


# Digests, as `canary::digest` has them.

def contents_of(tag, table):
    size, shape = SIZES[tag["d"]], tag["h"]
    if 0 in shape:
        return b""
    block = table[tag["s"]]
    strides = tag.get("t")
    if strides is None:
        strides, step = [], 1
        for extent in reversed(shape):
            strides.insert(0, step)
            step *= extent
    def walk(at, dims):
        if not dims:
            yield block[at:at + size]
            return
        (extent, stride), rest = dims[0], dims[1:]
        if not rest and stride == 1:
            yield block[at:at + extent * size]
            return
        for index in range(extent):
            yield from walk(at + index * stride * size, rest)
    return b"".join(walk(tag.get("o", 0), list(zip(shape, strides))))


def of_bytes(data):
    return b"".join(zlib.crc32(data[at:at + 4096]).to_bytes(4, "little") for at in range(0, len(data), 4096))


def feed(value, table):
    if value is None:
        return b"n"
    if value is True or value is False:
        return b"b1" if value else b"b0"
    if isinstance(value, Float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, str):
        text = value.encode()
        return b"s%d;" % len(text) + text
    if isinstance(value, list):
        return b"l%d;" % len(value) + b"".join(feed(item, table) for item in value)
    keys = list(value)
    if len(keys) == 1 and re.match(r"\$[^$]", keys[0]):
        tag, content = keys[0][1], value[keys[0]]
        if tag == "i":
            return b"i" + content.encode() + b";"
        if tag == "f":
            return b"f" + int(content, 16).to_bytes(8, "little")
        if tag == "b":
            data = base64.b64decode(content)
            return b"y%d;" % len(data) + data
        if tag in "ts":
            items = b"".join(feed(item, table) for item in content)
            return (b"t" if tag == "t" else b"e") + b"%d;" % len(content) + items
        if tag == "m":
            pairs = b"".join(feed(key, table) + feed(item, table) for key, item in content)
            return b"m%d;" % len(content) + pairs
        if tag == "T":
            head = b"T%s;%d;" % (content["d"].encode(), len(content["h"]))
            extents = b"".join(b"%d;" % extent for extent in content["h"])
            return head + extents + of_bytes(contents_of(content, table))
        raise ValueError(keys[0])
    out = b"m%d;" % len(keys)
    for key, item in value.items():
        out += feed(key[1:] if key.startswith("$") else key, table) + feed(item, table)
    return out


def digest(value, table):
    return hashlib.sha256(feed(value, table)).hexdigest()


# The conversation.

HELLO = {"v": 3, "k": "hello", "role": "worker", "speaks": [3, 3], "facts": {"page": str(mmap.PAGESIZE)},
         "waits": 10000, "offers": [{"r": "shm", "m": 2}, {"r": "inline", "m": 1}]}
numbered, tampered, leases, to_release, to_accept = {}, [], iter(range(1, 1 << 30)), [], []


def tamper(fd):
    """Everything that would pull memory from under its owner, or change it; what of it worked."""
    def again():
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    punch = ctypes.CDLL(None, use_errno=True).fallocate
    punch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    attempts = {
        "shrunk": lambda: os.ftruncate(fd, 1),
        "grown": lambda: os.ftruncate(fd, 1 << 30),
        "shrunk again": lambda: os.ftruncate(again(), 1),
        "written": lambda: os.pwrite(fd, b"x", 0),
        "written again": lambda: os.pwrite(again(), b"x", 0),
        "mapped": lambda: mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        "sealed": lambda: fcntl.fcntl(fd, F_ADD_SEALS, WRITE),
        "punched": lambda: punch(fd, 3, 0, 4096) == 0 or os.ftruncate(-1, 0),
    }
    done = []
    for name, attempt in attempts.items():
        try:
            attempt()
            done.append(name)
        except OSError:
            pass
    return done


def riders():
    message = {}
    if to_release:
        message["rel"] = [{"r": "shm", "l": lease} for lease in to_release]
    if to_accept:
        message["acc"] = [list(one) for one in to_accept]
    to_release.clear()
    to_accept.clear()
    return message


def take(parcels, fds):
    """The blocks of a message, whose leases go home with what is said next."""
    table = []
    for parcel in parcels:
        number = (parcel.get("m") or {}).get("b")
        if parcel.get("h"):
            fd = fds.pop(0)
            block = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
            tampered.extend(tamper(fd))
            os.close(fd)
            if number is not None:
                numbered[number] = block
        else:
            block = numbered[number]
        table.append(block[:parcel["n"]])
        to_release.append(parcel["l"])
    return table


def parcel(length, rung="shm", handles=1, meta=None):
    return {"r": rung, "l": next(leases), "n": length, "h": handles, "m": meta}


def ret(call, value, fds=(), parcels=()):
    send({"v": 3, "k": "ret", "id": call["id"], "n": 1, "p": list(parcels), "a": value, **riders()}, fds)
    for fd in fds:
        os.close(fd)


def sealed_again(table):
    """The same blocks, each a sealed one of this process's."""
    fds = [memfd(block, SEALED) for block in table]
    return fds, [parcel(len(block)) for block in table]


def own_call(number, method, argument, fds=(), parcels=()):
    send({"v": 3, "k": "call", "id": number, "n": 1, "m": method, "p": list(parcels), "a": argument, **riders()}, fds)
    while True:
        message, fds = receive()
        if message["k"] == "ret" and message["id"] == number:
            take(message["p"], fds)
            to_accept.append(("ret", number, 1))
            return message["a"]
        if message["k"] in ("err", "nack"):
            sys.exit(70)


def prove():
    """Answers the host's canaries, and flies its own."""
    send(HELLO)
    receive()
    while True:
        message, fds = receive()
        if message["k"] != "call":
            continue
        argument = message["a"]
        table = take(message["p"], fds)
        if message["m"] == "$findings":
            ret(message, None)
            break
        value = argument["v"]
        rode = [[name, "shm" if "$T" in (item if isinstance(item, dict) else {}) and 0 not in item["$T"]["h"]
                 else "inline"] for name, item in value.items()]
        fds, parcels = sealed_again(table)
        ret(message, {"d": digest(value, table), "l": rode, "v": value}, fds, parcels)
    contents = os.urandom(10000)
    found = []
    for rung in ("shm", "inline"):
        if rung == "shm":
            value = {"whole": {"$T": {"d": "u8", "h": [10000], "s": 0}}}
            fds, parcels, table = [memfd(contents, SEALED)], [parcel(10000)], [contents]
        else:
            value, fds, parcels, table = {"leaf0": [1, Float(0.5), "x"]}, [], [], []
        answer = own_call(len(found) + 1, "$canary", {"r": rung, "d": "host", "v": value}, fds, parcels)
        if answer["d"] != digest(value, table):
            sys.exit(71)
        found.append([rung, "host", None, "", None, ""])
    own_call(3, "$findings", found)


def tensor(count, dtype="u8"):
    return {"$T": {"d": dtype, "h": [count], "s": 0}}


def calls():
    while True:
        message, fds = receive()
        if message["k"] == "call":
            yield message, take(message["p"], fds)
        for fd in fds:
            os.close(fd)


def honest(message, table):
    fds, parcels = sealed_again(table)
    ret(message, message["a"], fds, parcels)


def writes_what_it_lent(message, table):
    fd, mine = lent(bytes([1]) * 65536)
    def scribble():
        for turn in range(1 << 60):
            mine[:] = bytes([1 + turn % 2]) * 65536
    threading.Thread(target=scribble, daemon=True).start()
    ret(message, tensor(65536), [fd], [parcel(65536)])


def answers_with(make, length=65536, value=None, **parts):
    def act(message, table):
        for attempt in range(1, 1 << 30):
            fds = make()
            text = {"v": 3, "k": "ret", "id": message["id"], "n": attempt, "p": [parcel(length, **parts)],
                    "a": tensor(length) if value is None else value, **riders()}
            send(text, fds)
            for fd in fds:
                os.close(fd)
            while True:
                heard, _ = receive()
                if heard["k"] == "nack":
                    break
                if heard["k"] == "call":
                    return
    return act


def pipe():
    read, write = os.pipe()
    os.close(write)
    return [read]


def a_file_on_disk():
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.write(fd, bytes(65536))
    return [fd]


def drips(message, table):
    text = dump({"v": 3, "k": "ret", "id": message["id"], "n": 1, "p": [], "a": 1}).encode()
    for byte in struct.pack(">IH", len(text), 0) + text:
        wire.sendall(bytes([byte]))
        time.sleep(0.05)


def receipts_for_what_was_never_lent(message, table):
    to_release.extend([12345, 2 ** 64 - 1, 0])
    to_accept.append(("call", 999, 7))
    ret(message, 1)


def counts_that_overflow(message, table):
    fd = memfd(bytes(4096), SEALED)
    value = {"$T": {"d": "f64", "h": [2 ** 40, 2 ** 40], "t": [2 ** 62, -2 ** 62], "o": 2 ** 63, "s": 0}}
    ret(message, value, [fd], [parcel(4096)])


def many_descriptors(message, table):
    fds = [memfd(b"x", SEALED) for _ in range(250)]
    ret(message, 1, fds, [])


def tells_what_it_changed(message, table):
    ret(message, tampered)


def cuts_off_what_it_sent(message, table):
    """Takes the memory away that it has just sent, by its own descriptor."""
    fd = memfd(bytes(65536), SEALED)
    send({"v": 3, "k": "ret", "id": message["id"], "n": 1, "p": [parcel(65536)], "a": tensor(65536), **riders()}, [fd])
    tampered.extend(tamper(fd))


def closes_everything(message, table):
    os.closerange(0, 4096)
    time.sleep(3)


def forks_and_goes(message, table):
    if os.fork() == 0:
        # Keeps the socket and everything that was lent open.
        time.sleep(3)
        os._exit(0)
    os._exit(9)


MISCHIEF = {
    "writes-what-it-lent": writes_what_it_lent,
    "lends-what-it-can-write": answers_with(lambda: [lent(bytes(65536))[0]]),
    "no-seal": answers_with(lambda: [memfd(bytes(65536), SHRINK)]),
    "shorter-than-it-says": answers_with(lambda: [memfd(bytes(100), SEALED)]),
    "holes": answers_with(lambda: [memfd(b"", SEALED, 65536)]),
    "pipe": answers_with(pipe),
    "file-on-disk": answers_with(a_file_on_disk),
    "socket-itself": answers_with(lambda: [os.dup(wire.fileno())]),
    "huge": answers_with(lambda: [memfd(bytes(4096), SEALED)], 2 ** 63),
    "a-block-by-no-number": answers_with(lambda: [], handles=0, meta={"b": 77}),
    "unknown-metadata": answers_with(lambda: [memfd(bytes(65536), SEALED)], meta={"zz": 1}),
    "counts-that-overflow": counts_that_overflow,
    "drips": drips,
    "tells-what-it-changed": tells_what_it_changed,
    "cuts-off-what-it-sent": cuts_off_what_it_sent,
    "closes-everything": closes_everything,
    "receipts-for-what-was-never-lent": receipts_for_what_was_never_lent,
    "many-descriptors": many_descriptors,
    "forks-and-goes": forks_and_goes,
    "honest": honest,
}


def main():
    kind = sys.argv[1]
    act = MISCHIEF[kind]
    prove()
    for message, table in calls():
        act(message, table)


main()
