# tiedgpt serve in a container: PyTorch's CPU build, no compiler, no root.
#
#   docker build -t tiedgpt .
#   docker run --rm -p 8000:8000 -v "$PWD/runs/my-1:/model:ro" -e TIEDGPT_API_KEY=SECRET tiedgpt
FROM python:3.13-slim AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN python -m venv /app \
 && /app/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    -c constraints.txt '.[serve]'

FROM python:3.13-slim
COPY --from=build /app /app
RUN useradd --create-home --uid 1000 gpt && install --directory --owner=gpt /home/gpt/kernels
USER 1000
WORKDIR /home/gpt
# compiled kernels are kept here: mount a volume to keep them for the next container
ENV PATH=/app/bin:$PATH NUMBA_CACHE_DIR=/home/gpt/kernels PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --start-period=2m --interval=30s --timeout=5s CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tiedgpt", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["/model"]
