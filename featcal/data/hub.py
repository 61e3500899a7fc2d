"""One split of a data set of the Hugging Face hub: downloaded once, then read from the cache
without a connection.

`datasets` alone takes whatever it prepared last when the hub does not answer; here it is the commit
and configuration asked for, or an error. Knows nothing of columns.
"""

from pathlib import Path

import datasets
import yaml
from datasets.exceptions import DatasetGenerationError, DatasetsError, FileNotFoundDatasetsError
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.cache.cache import Cache
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard, hf_hub_download
from huggingface_hub import errors as hub_errors
from pyarrow import ArrowInvalid

from featcal.data.hub_cache import cached_commit, first_line, reaching, unreachable
from featcal.data.place import Place
from featcal.errors import BadData

_UNUSABLE = (FileNotFoundDatasetsError, DatasetsError, ValueError, RuntimeError, yaml.YAMLError)
_CHECK = "check split and configuration, and that the data set is of files (parquet, JSON lines, pictures), without a script"
_MEND = "mend them there, or name another revision, owner/name@revision"


def hub_split(place: Place, split: str, more: str = "") -> datasets.Dataset:
    """All columns of one split.

    more:   added to the reason when nothing of this name can be had.
    Raises: NotOnHub, HubUnreachable, DiskFull; BadData for an unknown split or configuration and
    for a repository that holds
            no data set or files that cannot be read.
    """
    name, revision = str(place.source), place.revision or "main"
    at = f"{name}@{revision}"
    with reaching(name, revision, more, "dataset"):
        try:
            readme, commit = _asked(name, revision)
            prepared = _prepared(name, commit, place.config or _default_config(readme))
            return (prepared or _downloaded(name, revision, commit, place.config)).as_dataset(split)
        except (DatasetGenerationError, ArrowInvalid) as error:
            raise BadData(
                at, f"its files cannot be read ({first_line(error.__cause__ or error)})", _MEND
            ) from None
        except _UNUSABLE as error:
            raise BadData(at, first_line(error).rstrip("."), _CHECK) from None


def _asked(name: str, revision: str) -> tuple[Path | None, str]:
    """The data set's README.md, if it has one, and the commit: as the hub says, else as the cache
    knows them.
    """
    try:
        readme = Path(hf_hub_download(name, "README.md", repo_type="dataset", revision=revision))
    except (
        hub_errors.EntryNotFoundError
    ) as error:  # it has none, or none in the cache; the client notes the commit in any case
        commit = cached_commit(name, "dataset", revision)
        if commit is None:
            raise (error.__cause__ or error) from None
        return None, commit
    return readme, readme.parent.name


def _default_config(readme: Path | None) -> str | None:
    """The configuration that is meant when none is named; None where one must be named."""
    card = DatasetCard.load(readme, ignore_metadata_errors=True) if readme else None
    configs = MetadataConfigs.from_dataset_card_data(card.data) if card else None
    return configs.get_default_config_name() if configs else "default"


def _prepared(name: str, commit: str, config: str | None) -> datasets.DatasetBuilder | None:
    """What an earlier run made of exactly this commit and configuration; whole, as it is renamed
    into place when done.
    """
    owner, short = name.split("/")
    root = (
        Path(datasets.config.HF_DATASETS_CACHE)
        / f"{owner}___{camelcase_to_snakecase(short)}"
        / str(config)
    )
    found = [
        folder
        for folder in sorted(root.glob(f"*/{commit}"))
        if (folder / "dataset_info.json").is_file()
    ]
    if config is None or not found:
        return None
    return Cache(
        repo_id=name,
        dataset_name=short,
        config_name=config,
        version=found[-1].parent.name,
        hash=commit,
    )


def _downloaded(
    name: str, revision: str, commit: str, config: str | None
) -> datasets.DatasetBuilder:
    """The data set prepared in the cache. The prefix: a folder of the same name below the current
    one must not be taken.
    """
    builder = datasets.load_dataset_builder(f"hf://datasets/{name}", config, revision=commit)
    if builder.hash != commit:
        raise unreachable(
            f"{name}@{revision}", f"the cache holds another commit of it, {builder.hash}"
        )
    builder.download_and_prepare()
    return builder
