"""Stage `pretrain`: the base of one role of the mini suite; frozen, its output ships with the
package.
"""

from featcal.settings import project_root


def run(key: str) -> None:
    """Write reproduction/mini/models/<role>/; an interrupted run goes on where it was."""
    root = project_root()
    out, state = root / "reproduction" / "mini" / "models" / key, root / ".featcal" / "pretrain"
    if key.startswith("llama"):
        from reproduction.mini.language.llama import pretrain_llama

        pretrain_llama(key, out=out, state_folder=state)
    elif key.startswith("flan_t5"):
        from reproduction.mini.language.t5 import pretrain_t5

        pretrain_t5(key, out=out, state_folder=state)
    else:
        from reproduction.mini.pretrain import pretrain

        pretrain(key, out=out, state_folder=state)
