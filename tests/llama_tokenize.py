"""Script: llama.cpp's token ids of texts. Usage: llama_tokenize.py MODEL < {"texts": [...], "parse_special": bool}"""

import json
import sys
import urllib.request

import xllamacpp

request = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 64
params.n_parallel = 1
params.warmup = False
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)


def ids(text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": False, "parse_special": request["parse_special"]}).encode()
    call = urllib.request.Request(f"{server.listening_address}/tokenize", data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(call) as answer:
        return json.load(answer)["tokens"]


print(json.dumps([ids(text) for text in request["texts"]]))
