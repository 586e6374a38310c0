"""The cost model: the time that a compiled program takes on a described cluster, computed from data sheets."""
