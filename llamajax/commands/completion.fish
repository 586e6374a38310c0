# Completion of llamajax in fish: llamajax completion fish | source
function __llamajax_candidates
    set -l words (commandline -opc)
    set -l current (string unescape -- (commandline -ct))
    for line in ($words[1] completion -- $words[2..-1] $current 2>/dev/null)
        if test "$line" = :files
            if string match -q -- '-*=*' $current
                set -l option (string split -m 1 = -- $current)
                printf '%s\n' $option[1]=(__fish_complete_path $option[2])
            else
                __fish_complete_path $current
            end
        else
            printf '%s\n' $line
        end
    end
end
complete -c llamajax -f -a '(__llamajax_candidates)'
