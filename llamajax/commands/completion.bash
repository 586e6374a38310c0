# Completion of llamajax in bash: eval "$(llamajax completion bash)"
_llamajax() {
    local -a words=()
    local i word candidate after_equals= cut= text
    for ((i = 1; i <= COMP_CWORD; i++)); do # bash splits words at =, llamajax does not
        word=${COMP_WORDS[i]}
        if [[ $word == '=' && ${#words[@]} -gt 0 ]]; then
            words[-1]+='='
            after_equals=1
        elif [[ $after_equals ]]; then
            words[-1]+=$word
            after_equals=
        else
            words+=("$word")
        fi
    done
    text=${words[-1]}
    if [[ $text == -*=* && $COMP_WORDBREAKS == *=* ]]; then
        cut=${text%%=*}=
    fi
    COMPREPLY=()
    while IFS= read -r candidate; do
        candidate=${candidate%%$'\t'*}
        if [[ $candidate == ':files' ]]; then
            compopt -o filenames
            mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "${text#"${text%%=*}"=}")
        elif [[ $candidate ]]; then
            COMPREPLY+=("${candidate#"$cut"}")
        fi
    done < <("${COMP_WORDS[0]}" completion -- "${words[@]}" 2> /dev/null)
    if [[ ${COMPREPLY[0]} == *[.=] ]]; then
        compopt -o nospace
    fi
}
complete -F _llamajax llamajax
