"""Ray on this node: its processes, and a head whose raylet alone has died."""
