"""Where the files of one control plane are, and on which ports it listens. Pure."""

from dataclasses import dataclass
from pathlib import Path

from controlplane.ports import free_ports


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below one state folder."""

    root: Path
    """Absolute path of the state folder; only its owner can enter it."""

    @property
    def marker(self) -> Path:
        """File that makes a folder a state folder: nothing is ever removed from a folder without it."""
        return self.root / "controlplane.json"

    @property
    def socket(self) -> Path:
        """Unix socket of the supervisor."""
        return self.root / "control.sock"

    @property
    def admin_kubeconfig(self) -> Path:
        """Credentials of the administrator (group system:masters)."""
        return self.root / "admin.kubeconfig"

    @property
    def etcd_data(self) -> Path:
        """Data folder of etcd; made by etcd with the mode it insists on."""
        return self.root / "etcd"

    @property
    def kubectl_cache(self) -> Path:
        """Discovery cache of kubectl: the shared one in the home folder is keyed by port, and ports return."""
        return self.root / "kubectl-cache"

    def pki(self, name: str) -> Path:
        """Return the path of one key or certificate file."""
        return self.root / "pki" / name

    def kubeconfig(self, name: str) -> Path:
        """Return the path of one component's kubeconfig."""
        return self.root / "kubeconfig" / name

    def log(self, name: str) -> Path:
        """Return the path of one component's log."""
        return self.root / "log" / f"{name}.log"

    def make_folders(self) -> None:
        """Create the state folder and its sub-folders, for the owner only."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root.chmod(0o700)
        for name in ("pki", "kubeconfig", "log"):
            (self.root / name).mkdir()


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports of one control plane."""

    api: int
    etcd_client: int
    etcd_peer: int

    @classmethod
    def choose(cls) -> "Ports":
        """Choose ports on which nothing listens now."""
        return cls(*free_ports(3))
