"""The cost model: how long a compiled program takes on a described cluster, told from data sheets."""
