import pytest

from hone.insight.run_directory import RunDirectory


@pytest.fixture
def make_run(tmp_path):
    """Write a run below ``tmp_path / "runs"``: ``make_run("project/name", rows, config=..., status=...)``."""

    def make(name, rows, *, config="trainer:\n  seed: 1\n", status="finished"):
        run = RunDirectory(tmp_path / "runs" / name)
        run.start(seed=1, config_yaml=config, command=["hone", "train"])
        for row in rows:
            run.log_metrics(row["step"], {key: value for key, value in row.items() if key != "step"})
        if status != "running":
            run.update_status(status, "because")
        run.close()
        return run.path

    return make
