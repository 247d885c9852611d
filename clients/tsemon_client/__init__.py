"""Ask a tsemon service about its runs.

from tsemon_client import Client
client = Client("http://127.0.0.1:8731")
run = client.find_run("gpt-82m")
client.series(run["run_id"], "token_similarity", layer=-1)
"""

from tsemon_client.client import Client

__all__ = ["Client"]
