"""A tiny engine behind the application, in this process and on a socket; a browser."""

import os
import threading

import pytest

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from tests.models import TEXT, opinionated
from tiedgpt import Tokenizer
from tiedgpt.infer import Engine
from tiedgpt.serve.app import create_app
from tiedgpt.serve.guards import Limits
from tiedgpt.serve.server import Server, open_socket

LIMITS = Limits(queue=8)


@pytest.fixture(scope="package")
def engine():
    tokenizer = Tokenizer.train([TEXT], 300)
    with Engine(opinionated(tokenizer), tokenizer=tokenizer, slots=4, queue_size=8) as engine:
        yield engine


@pytest.fixture(scope="package")
def app(engine):
    return create_app(engine, name="tiny", limits=LIMITS)


@pytest.fixture
def client(app):
    return TestClient(app, base_url="http://127.0.0.1")


@pytest.fixture(scope="module")
def browser():
    from tests.serve.browsing import CHROMIUM, OPTIONS

    sync_api = pytest.importorskip("playwright.sync_api")
    if not os.path.exists(CHROMIUM):
        pytest.fail(f"{CHROMIUM} is not there: install Chromium, or name one with CHROMIUM=...")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


class Running:
    """The application of an engine, served in a thread."""

    def __init__(self, engine, limits=LIMITS, **options):
        app = create_app(engine, limits=limits, **{"name": "tiny"} | options)
        self.listener = open_socket("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(limits)
        self.server.open(app, engine)
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],))

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            threading.Event().wait(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def running(engine):
    with Running(engine) as running:
        yield running
