"""A NIXL whose WRITEs go from one process of this machine to another, and which does what a test wants."""

# Notifications are files, WRITEs go straight into the other process's memory.
NIXL = """
import os, pathlib, time
MAIL = pathlib.Path(os.environ["FAKE_NIXL"])
FAULT = os.environ.get("FAKE_FAULT", "")

class nixl_agent_config:
    def __init__(self, **options):
        self.options = options

class nixl_agent:
    def __init__(self, name, config):
        if FAULT == "no backend":
            self.backends = {}
        else:
            self.backends = {"UCX": 1}
        if FAULT == "abort":
            os.abort()
        print("[1795981402.5] [d1:1:0]  | w inter-node cfg#1 |")
        print("[1795981402.5] [d1:1:0]  | remote memory write by ucp_put* from host memory to host |")
        print("[1795981402.5] [d1:1:0]  | 0..inf | zero-copy | tcp/eth0 |", flush=True)
        self.name, self.number, self.lists = name, 0, {}
        (MAIL / name).mkdir()
    def get_plugin_list(self):
        return ["POSIX"]
    def get_reg_descs(self, rows, kind):
        return rows
    def register_memory(self, rows, backends):
        if FAULT == "register":
            raise RuntimeError("NIXL_ERR_BACKEND: cannot register")
        return rows
    def get_agent_metadata(self):
        return f"{self.name} {os.getpid()}".encode()
    def add_remote_agent(self, data):
        if FAULT == "hang" and "prefill" in self.name:
            time.sleep(1000)
        name, pid = data.decode().split()
        self.peer = int(pid)
        return name
    def get_xfer_descs(self, rows, kind):
        return rows
    def prep_xfer_dlist(self, name, rows):
        return rows
    def make_prepped_xfer(self, operation, mine, local, theirs, remote, notification):
        return [list(zip(mine[local], theirs[remote])), notification]
    def transfer(self, handle):
        if FAULT == "write":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        if FAULT == "stuck":
            return "PROC"
        pieces, notification = handle
        with open(f"/proc/{self.peer}/mem", "r+b", 0) as memory:
            for number, (source, target) in enumerate(pieces):
                if FAULT == "lose" and number == 3:
                    continue
                memory.seek(int(target[0]))
                memory.write((__import__("ctypes").c_char * int(source[1])).from_address(int(source[0])).raw)
        if FAULT != "no notification":
            self.send_notif(None, notification)
        return "DONE"
    def check_xfer_state(self, handle):
        return "PROC"
    def query_xfer_backend(self, handle):
        return "UCX"
    def send_notif(self, name, message):
        self.number += 1
        other = next(folder for folder in MAIL.iterdir() if folder.name != self.name)
        draft = MAIL.parent / f"{self.name}-{self.number}"
        draft.write_bytes(message)
        draft.rename(other / f"{self.number:06d}")
    def get_new_notifs(self):
        found = []
        for file in sorted((MAIL / self.name).iterdir()):
            found.append(file.read_bytes())
            file.unlink()
        return {"other": found} if found else {}
    def _note(self, *_):
        with open(MAIL.parent / "released", "a") as file:
            file.write(self.name + "\\n")
    release_xfer_handle = deregister_memory = remove_remote_agent = release_dlist_handle = _note
"""
