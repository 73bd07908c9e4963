import queue
import sys

import numpy as np
import tritonclient.grpc as grpc
from report import attempt

client = grpc.InferenceServerClient(sys.argv[3])


def text():
    given = grpc.InferInput("text_input", [1], "BYTES")
    given.set_data_from_numpy(np.array([b"Once"], dtype=np.object_))
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("nsm", [given], parameters={"max_tokens": 8}, enable_empty_final_response=True)
    pieces = []
    while True:
        result, error = answers.get(timeout=60)
        if error is not None:
            raise error
        pieces.append(result.as_numpy("text_output"))
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
    return any(piece is not None for piece in pieces)


attempt("model ready", lambda: client.is_model_ready("nsm"))
attempt("decoupled stream", text)
