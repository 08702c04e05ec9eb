"""What a user would write: a FastAPI server that searches one request at a time with the same library and index."""

import argparse
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from protocol.http.listen import address_of, bind
from retriever.index_folder import open_or_build
from retriever.indexes.bm25 import Bm25Index, words_of
from retriever.indexes.by_name import add_index_arguments, index_options


def main() -> int:
    parser = argparse.ArgumentParser()
    add_index_arguments(parser)
    parser.add_argument("--port", type=int)
    parser.add_argument("--cache-size")
    arguments = parser.parse_args()
    folder, options = index_options(arguments)
    index, corpus, _ = open_or_build(Path(folder), arguments.corpus_path, arguments.retriever_name, options)

    # Imported after ours, which leaves numba out: the same library in the same form.
    import bm25s

    scorer = bm25s.BM25.load(folder, allow_pickle=False) if isinstance(index, Bm25Index) else None

    def found_by(query: str, topk: int) -> list[tuple[int, float]]:
        if scorer is not None:
            # As bm25s's own documentation searches, with the same words.
            tokens = [word for word in words_of(query) if word in scorer.vocab_dict]
            rows, scores = scorer.retrieve([tokens], k=topk, show_progress=False)
            return [(int(row), float(score)) for row, score in zip(rows[0], scores[0], strict=True) if score > 0]
        scores, rows = index._vectors.search(index._encoder.queries([query]), topk)  # type: ignore[attr-defined]
        return list(zip(rows[0].tolist(), scores[0].tolist(), strict=True))

    def document(row: int) -> dict[str, str]:
        return {"id": corpus.ids[row], "contents": corpus.contents[row]}

    app = FastAPI()

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict[str, Any]:
        body = await request.json()
        found = [found_by(query, body["topk"]) for query in body["queries"]]
        if not body.get("return_scores"):
            return {"result": [[document(row) for row, _ in hits] for hits in found]}
        return {"result": [[{"document": document(row), "score": score} for row, score in hits] for hits in found]}

    listener = bind("plain", "127.0.0.1", arguments.port)
    listener.listen(1024)
    print(address_of(listener), flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
