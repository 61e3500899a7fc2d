"""Stage `pretrain`: the base of one size of the mini suite; frozen, its output ships with the package."""

from featcal.settings import project_root


def run(key: str) -> None:
    """Write featcal/mini/models/<role>/; an interrupted run goes on where it was."""
    from featcal.mini.pretrain import pretrain

    root = project_root()
    pretrain(key, out=root / "featcal" / "mini" / "models" / key, state_folder=root / ".featcal" / "pretrain")
