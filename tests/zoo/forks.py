"""Runs a function on many items, each in a forked process with a time limit: Transformers is imported once."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback


def child(function, item, pipe):
    try:
        os.setpgrp()
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        answer = ("done", function(item))
    except BaseException as error:
        answer = ("error", f"{type(error).__name__}: {error}", traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    os._exit(0)


def run_forked(function, items, processes=2, timeout=60):
    """Yields `(item, answer, seconds)`: answer is ("done", value), ("error", text, trace) or ("died", reason)."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(items)[::-1], {}
    while waiting or running:
        while waiting and len(running) < processes:
            item = waiting.pop()
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(function, item, send), daemon=True)
            process.start()
            send.close()
            running[receive] = (item, process, time.monotonic())
        ready = multiprocessing.connection.wait(list(running), timeout=0.5)
        late = [
            p
            for p, (_, _, start) in running.items()
            if p not in ready and time.monotonic() - start > timeout
        ]
        for pipe in [*ready, *late]:
            item, process, start = running.pop(pipe)
            answer = finish(pipe, process, pipe in ready, timeout)
            yield item, answer, time.monotonic() - start


def finish(pipe, process, ready, timeout):
    if not ready:
        process.kill()
        process.join()
        return ("died", f"no answer within {timeout:.0f} s")
    try:
        answer = pipe.recv()
    except EOFError:
        process.join()
        return ("died", died_of(process.exitcode))
    process.join()
    return answer


def died_of(code):
    """Why a process ended without an answer."""
    if code == -signal.SIGXCPU:
        return "it used up its time on the processor"
    return (
        f"the process was killed by {signal.Signals(-code).name}"
        if code and code < 0
        else f"the process ended with code {code}"
    )
