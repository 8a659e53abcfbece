"""The study: are the claims of the FedHKD paper true? Its runs as small files, and docs/study.md, computed from them.

    python -m tools.study collect ROOT TABLE        the finished runs of a comparison or a sweep, into data/TABLE.jsonl
    python -m tools.study page                      the tables, verdicts and figures of docs/study.md, from those files
    python -m tools.study verify                    whether each of its numbers is theirs
    python -m tools.study run TABLE ROW SEED        one of the runs once more: are the weights those of then?
    python -m tools.study seconds                   what FedHKD takes of FedAvg's time, measured alone
    python -m tools.study coverage                  the statistics on studies whose truth is known

An installed package has it as `python -m hkd_hpc.tools.study`, with the page; the README's summary is in a clone alone.
"""
